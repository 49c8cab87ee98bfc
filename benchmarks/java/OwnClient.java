import java.math.BigDecimal;
import java.nio.charset.StandardCharsets;
import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.SQLException;
import java.sql.Statement;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Callable;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.PushConsumer;
import org.apache.rocketmq.client.apis.message.Message;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.Transaction;
import org.apache.rocketmq.client.apis.producer.TransactionResolution;

/**
 * RocketMQ's own client at the messages of benchmarks/engines.py: half, row and commit; half and commit; plain.
 *
 * Arguments: HOST:PORT of the proxy, topic, consumer group, messages, threads, JDBC URL. Prints one line per way of
 * sending, with tabs between: its name, messages per second, and the latencies in milliseconds from send to listener.
 */
public final class OwnClient {
    private static final int WARMING = 200;

    private final ClientServiceProvider provider = ClientServiceProvider.loadService();
    private final List<Double> latencies = Collections.synchronizedList(new ArrayList<>());
    private final ThreadLocal<Connection> connections;
    private final Producer producer;
    private final String topic;

    private OwnClient(ClientConfiguration configuration, String topic, String database) throws Exception {
        this.topic = topic;
        this.connections = ThreadLocal.withInitial(() -> connection(database));
        this.producer = provider.newProducerBuilder()
            .setClientConfiguration(configuration)
            .setTopics(topic)
            .setTransactionChecker(message -> TransactionResolution.COMMIT)
            .build();
    }

    public static void main(String[] given) throws Exception {
        ClientConfiguration configuration = ClientConfiguration.newBuilder()
            .setEndpoints(given[0])
            .enableSsl(false)
            .setRequestTimeout(Duration.ofSeconds(20))
            .build();
        OwnClient client = new OwnClient(configuration, given[1], given[5]);
        try (Connection connection = DriverManager.getConnection(given[5]); Statement create = connection.createStatement()) {
            create.execute("CREATE TABLE orders (id bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY, "
                + "customer varchar(100) NOT NULL, total numeric(12, 2) NOT NULL, status varchar(20) NOT NULL, "
                + "created_at timestamptz NOT NULL DEFAULT now())");
        }
        int count = Integer.parseInt(given[3]);
        int threads = Integer.parseInt(given[4]);
        try (PushConsumer consumer = client.consumer(configuration, given[2])) {
            // The first run also warms up Java's compilers, so its figure is the less favourable one.
            client.run("half and commit", count, threads, client::inTransaction);
            client.run("half, row and commit", count, threads, client::withRow);
            client.run("plain", count, threads, client::plainly);
        }
        client.producer.close();
        System.exit(0);
    }

    private PushConsumer consumer(ClientConfiguration configuration, String group) throws Exception {
        return provider.newPushConsumerBuilder()
            .setClientConfiguration(configuration)
            .setConsumerGroup(group)
            .setSubscriptionExpressions(Map.of(topic, FilterExpression.SUB_ALL))
            .setMessageListener(view -> {
                long sentAt = Long.parseLong(StandardCharsets.UTF_8.decode(view.getBody()).toString().strip());
                latencies.add(System.currentTimeMillis() - (double) sentAt);
                return ConsumeResult.SUCCESS;
            })
            .build();
    }

    private interface Send {
        void one() throws Exception;
    }

    private void run(String name, int count, int threads, Send send) throws Exception {
        for (int n = 0; n < WARMING; n++) {
            send.one();
        }
        await(WARMING);
        latencies.clear();
        ExecutorService pool = Executors.newFixedThreadPool(threads);
        List<Callable<Void>> shares = new ArrayList<>();
        for (int n = 0; n < threads; n++) {
            shares.add(() -> {
                for (int sent = 0; sent < count / threads; sent++) {
                    send.one();
                }
                return null;
            });
        }
        long started = System.nanoTime();
        for (Future<Void> share : pool.invokeAll(shares)) {
            share.get();
        }
        double rate = count / threads * threads / ((System.nanoTime() - started) / 1e9);
        pool.shutdown();
        await(count / threads * threads);
        System.out.println(name + "\t" + rate + "\t" + latencies);
        latencies.clear();
    }

    private void await(int handled) throws InterruptedException {
        while (latencies.size() < handled) {
            Thread.sleep(5);
        }
    }

    private Message message() {
        // As long as the body of the other engines' messages.
        String body = String.format("%-140d", System.currentTimeMillis());
        return provider.newMessageBuilder().setTopic(topic).setBody(body.getBytes(StandardCharsets.UTF_8)).build();
    }

    private static Connection connection(String database) {
        try {
            Connection connection = DriverManager.getConnection(database);
            connection.setAutoCommit(false);
            return connection;
        } catch (SQLException error) {
            throw new IllegalStateException(error);
        }
    }

    private void withRow() throws Exception {
        Transaction transaction = producer.beginTransaction();
        producer.send(message(), transaction);
        Connection connection = connections.get();
        try (PreparedStatement insert = connection.prepareStatement(
                "INSERT INTO orders (customer, total, status) VALUES (?, ?, ?) RETURNING id")) {
            insert.setString(1, "customer");
            insert.setBigDecimal(2, new BigDecimal("129.90"));
            insert.setString(3, "paid");
            insert.execute();
        }
        connection.commit();
        transaction.commit();
    }

    private void inTransaction() throws Exception {
        Transaction transaction = producer.beginTransaction();
        producer.send(message(), transaction);
        transaction.commit();
    }

    private void plainly() throws Exception {
        producer.send(message());
    }
}
