from django.db import migrations, models
import outbox.contrib.django.models

from outbox.contrib.django.database.columns import compare_as_postgresql


class Migration(migrations.Migration):

    initial = True

    dependencies = [
    ]

    operations = [
        migrations.CreateModel(
            name='ForwardEndpoint',
            fields=[
                ('group', models.CharField(db_column='consumer_group', max_length=127, primary_key=True, serialize=False)),
                ('generation', models.IntegerField(default=0)),
                ('disabled_at', models.DateTimeField(null=True)),
                ('disabled_reason', models.TextField(default='')),
            ],
            options={
                'db_table': 'outbox_endpoint',
            },
        ),
        # MariaDB ends a transaction at each of these statements, and Django refuses them in one.
        migrations.RunPython(compare_as_postgresql('outbox_forwarding'), migrations.RunPython.noop, atomic=False),
    ]
